"""Words by which a standing instruction is told from other texts, in languages other than English.

Each language has the same kinds of words, so that what is learned about a kind holds in every
language: words of what lasts, of the form of answers, of requests that are carried out once and so
on. They are in lower case and without accents; `word*` stands for all words that begin so, `a_b`
for two words after each other. Chinese ones are found anywhere in a text.
"""

from __future__ import annotations

from collections.abc import Mapping

# By language, the kind of words and, after a colon, its words.
INSTRUCTION_WORDS: Mapping[str, str] = {
    "German": """
lasting: ab_jetzt ab_sofort ab_heute ab_nun von_nun von_jetzt kunftig* zukunftig* in_zukunft
  fortan weiterhin bis_auf solange hier_an nur_noch wahrend_des im_weiteren verlauf gesprach*
  unterhaltung
always: immer stets nie niemals grundsatzlich jeweils durchgehend durchweg ausschliesslich uberall
  jedes_mal jedesmal prinzipiell standardmassig keinesfalls auf_keinen generell dauerhaft
every: jede jeder jedem jeden jedes alle allen aller alles samtliche* ganze ganzen uberhaupt
form: antwort* antworten satz satze satzen wort worte worter* zeile* absatz* absatze* tabelle*
  liste* aufzahlung* stichpunkt* stichwort* punkte* uberschrift* emoji* smiley* format* markdown
  json code* kommentar* variable* variablen* funktion* einruck* deutsch* englisch* franzosisch*
  spanisch* italienisch* sprache* schrift* quelle* zitat* zahl zahlen datum daten uhrzeit*
  einheit* meter* kilo* gramm celsius fahrenheit euro* franken dollar* preise betrage* komma*
  nachkomma* ton* stil* formulier* abkurzung* fachbegriff* fachsprache* fremdwort* anglizism*
  floskel* link* formel* beispiel* zusammenfassung* einleitung* nachricht* text* texte* mail*
  brief* briefe* titel* anrede* gruss* zeichen* seite* erklarung* begrundung* losung* buchstabe*
  ausrufezeichen* bezeichn* begriff* namen
manner: kurz* knapp* einfach* hoflich* formlich* sachlich* neutral* ausfuhrlich* verstandlich*
  direkt* streng* freundlich* ehrlich* langsam deutlich* locker* humor* ironie* ironisch*
  wortlich* schlicht
address: duz* siez* sie du anred* ansprech* sprich nenn nenne nennen heisse heisst vorname* titel
  herr frau chefin chef_nennen per_du
use: verwend* benutz* nutz* vermeid* halte halt halten lass* verzicht* achte beacht* antworte*
  beginn* fang* hor* bleib* merk* denk* erwahn* gib geben schreib* sprich sprechen rede* sei sag*
  zeig* fass* rechne* nimm erklar* beruck* spiel* tu stell* behandel* setz* mach* geh* streich*
  fuge weise warn* frag* bezieh* ubersetz* korrigier* zitier* unterschreib* schliess* wiederhol*
  pass* formatier*
once: ubersetz* fass_den fass_das schreib_mir gib_mir erzahl* nenn_mir zeig_mir erstell* such*
  vergleich* liste entwirf* verfass* mach_mir mach_eine berechn* wandle korrigiere_diesen
  erklar_mir hilf* formulier* schreib_eine schreib_ein schreib_einen kannst konntest prufe ordne
  zahl_die kurze_den schlag gib_mir
this: dies* folgende* nochmal noch_mal diesmal heute morgen gestern hier_ist jetzt_das und_jetzt
  den_text der_text das_nochmal nachste* letzte*
need: allerg* vegan* vegetar* blind* farbenblind* gehorlos* taub* schwerhor* dyslex* legasthen*
  screenreader* vorlese* rollstuhl* diabet* gluten* laktose* zoliak* muslim* judisch* koscher*
  halal schwanger* anfanger* budget* behinder* augen leseschwach* vertrag* phobie* schlecht handy*
  kenntnis*
wish: bitte mochte will wunsche* hatte_gern hatte_gerne gern gerne lieber bevorzug* ware brauche
  soll sollst sollen muss mussen darf durfen wichtig brauchst
no: kein* nicht ohne weder statt anstatt weg verbot* unter_keinen
only: nur maximal hochstens mindestens mehr_als bloss lediglich ausschliesslich reicht reichen
if: wenn falls sobald sofern sollte solltest
self: ich mir mich mein meine meinem meinen meiner wir uns unser*
past: war waren hat hatte hatten habe haben wurde wurden ging kam sagte gesagt fruher seit ist_mir
  bin
people: er ihm ihn sein* mutter vater oma opa schwester bruder sohn tochter kind* mann nachbar*
  kolleg* freund* lehrer* arzt* chef man leute kunde*
asks: warum wieso weshalb wie was welche* wer wo wann wem wen wozu gibt kann hast ist lohnt stimmt
thanks: danke dank super perfekt prima toll nein doch hallo guten ok okay gut
""",
    "French": """
lasting: desormais dorenavant a_partir a_compter avenir la_suite jusqu_a nouvel_ordre tant_qu
  tant_que conversation discussion d_ici
always: toujours jamais systematiquement chaque_fois partout uniquement exclusivement en_toutes
  toute_la tjs tout_au au_long aucun_cas sans_exception
every: chaque chacun* tous toutes toute tout aucun aucune nulle
form: reponse* repond* phrase* mot mots ligne* paragraphe* tableau* liste* puce* point points
  titre* emoji* smiley* format* markdown json code* commentaire* variable* fonction* indent*
  francais anglais* allemand* espagnol* italien* langue* langage* orthograph* source* citation*
  chiffre* nombre* date dates heure* unite* metre* kilo* gramme* celsius euro* franc francs
  dollar* prix montant* decimale* virgule* ton style* abreviation* jargon terme* anglicisme* lien*
  formule* exemple* resume* introduction message* texte* courriel* mail* lettre* caractere* page*
  explication* solution* majuscule* minuscule* exclamation ecriture tiret* guillemet* references
  vocabulaire
manner: bref breve court* concis* simple* poli* formel* neutre* sobre* clair* direct* severe*
  chaleureux honnete* lent* lentement litteral* ironie humour facile* sec familier
address: tutoi* vouvoi* appelle appelez appeler nomme* madame monsieur docteur prenom* surnom*
  pronom* tu_me vous_me dis_vous
use: utilise utilisez utiliser emploie* evite* garde gardez gardons reponds repondez commence*
  finis* termine* arrete* cesse* reste restez retiens retenez souviens note notez pense pensez
  mentionn* indique* precise* ajoute* mets mettez ecris ecrivez parle parlez sois soyez fais
  faites considere* joue* comporte* pars tiens tenez respecte* signe* cite citez corrige* previens
  prevenez propose* laisse* adapte* traduis convertis appelle dis dites donne donnez explique*
  pose decris prends
once: traduis resume* ecris_moi ecris_un ecris_une donne_moi raconte* montre_moi explique_moi
  redige* trouve* compare* fais_un fais_une fais_moi calcule* transforme* corrige_cette aide* peux
  pourrais verifie* classe compte raccourcis cite_trois propose_un convertis rends cherche imagine
this: ce cet cette ceci suivant* ces aujourd_hui demain hier maintenant_la encore_un cette_fois
  le_texte l_article voici prochain* dernier*
need: allerg* vegan* vegetar* vegetal* aveugle* malvoyant* daltonien* sourd* malentend* dyslex*
  lecteur_d ecran fauteuil* diabet* gluten lactose coeliaque* musulman* juif* juive* casher halal
  enceinte debut* budget handicap* yeux phobie* niveau telephone
wish: svp stp s_il plait veux voudrais aimerais souhait* prefer* merci besoin faut doit doivent
  dois important tiens_a voulez voudrait serait
no: pas ne n sans ni jamais plutot au_lieu rien interdit* inutile evit* plus_de
only: seul* seulement uniquement maximum max minimum que_des plus_que rien_que juste suffi*
if: si quand lorsque des_que lorsqu* des_qu
self: je j me m moi mon ma mes nous notre nos
past: etait etaient ai a_ete avait avais avons suis_alle dit_que ont fut hier depuis avant ete
people: il elle ils lui sa son ses mere pere grand soeur frere fils fille enfant* mari femme
  voisin* collegue* ami amis prof chef patron medecin client*
asks: pourquoi comment quoi quel quelle quels quelles qui ou combien est_ce qu_est peut faut_il
  quand_est
thanks: merci_beaucoup super parfait bonjour non oui ok bon bien d_accord genial
""",
    "Spanish": """
lasting: a_partir en_adelante de_ahora desde_ahora desde_hoy desde_ya lo_sucesivo de_aqui
  hasta_nuevo mientras conversacion charla de_hoy
always: siempre nunca jamas cada_vez sistematicamente unicamente exclusivamente todas_partes a_lo
  todo_momento en_absoluto excepcion
every: cada todo todos todas toda ningun ninguna cualquier*
form: respuest* respond* frase* palabra* linea* parrafo* tabla* lista* vineta* punto puntos
  titulo* encabezad* emoji* emoticon* formato* markdown json codigo* comentario* variable*
  funcion* sangri* espanol* castellano ingles* frances* aleman* portugues* italiano* idioma*
  lengua* lenguaje* ortograf* fuente* cita citas numero* cifra* fecha* hora horas unidad* metro*
  kilo* gramo* grados celsius euro* peso pesos dolar* precio* importe* decimal* coma tono estilo*
  abreviatura* jerga tecnicismo* termino* anglicismo* enlace* formula* ejemplo* resumen*
  introduccion mensaje* texto* correo* carta* caracter* pagina* explicacion* solucion* mayuscula*
  minuscula* exclamacion comillas referencias vocabulario
manner: breve* corto* corta* cortito conciso* concisa* simple* sencill* educad* formal* neutral
  neutro direct* estrict* amable* sincer* claro despacio literal* ironia humor facil* seco cercano
address: tutea* tratame trate trata tratar usted llamame llameme llames llamar dime diga senor
  senora doctor* nombre pronombre* vos
use: usa use usar usas utiliza* emplea* evita* manten* responde respondeme contesta* empieza*
  empieces comienza* termina* acaba* deja deje sigue recuerda* acuerdate ten tenlo tenga menciona*
  menciones indica* precisa* anade* agrega* pon ponle ponga escribe* habla* se sea haz haga
  considera* actua* comporta* respeta* firma* cita citas corrige* corriges avisa* propon*
  propongas di da dame adapta* convierte pasa traduzcas explica* describ* procura toma calcula
once: traduce resume escribeme escribe_un escribe_una dame_cinco dame_un cuentame muestrame
  explicame redacta* busca* compara* haz_una haz_un hazme calcula convierte corrige_esta ayuda*
  puedes podrias mira ordena cuenta acorta reescribe imagina prepara* enviame dime_tres
this: esto este esta estos estas siguiente* hoy manana ayer ahora_lo otra_vez esta_vez el_texto
  el_articulo proxim* ultim*
need: alerg* vegan* vegetarian* ciego* ciega* daltonic* sord* dislex* lector_de pantalla silla*
  diabet* gluten lactosa celiac* musulman* judi* kosher halal embarazada principiante* presupuesto
  discapac* vista fobia nivel movil celular baja_vision
wish: por_favor porfa* xfa quiero quisiera gustaria prefiero prefer* necesito agradec* gracias
  debe deben debes hay_que tiene_que tienen_que importante ojala deseo
no: no sin ni nada tampoco lugar_de vez_de evita* prohib* jamas ya_no
only: solo solamente unicamente maximo minimo mas_de como_mucho basta
if: si cuando siempre_que en_cuanto
self: yo me mi mis conmigo nosotros nos nuestr* soy estoy tengo
past: era eran fue fueron he ha han hemos habia dijo ayer desde antes estuvimos
people: el_me ella ellos le les su sus madre padre abuel* herman* hijo hija hijos nin* marido
  mujer vecin* compan* amig* profesor* jefe jefa medico cliente*
asks: por_que como que cual cuales quien quienes donde cuando_es cuanto* cuanta* es_cierto hay
  se_puede
thanks: muchas_gracias genial perfecto hola buenos vale bien ok gracias_por
""",
    "Italian": """
lasting: d_ora da_ora da_oggi da_adesso da_qui in_poi in_avanti in_futuro fino_a nuovo_avviso
  finche conversazione innanzi da_questo
always: sempre mai ogni_volta sistematicamente esclusivamente ovunque in_nessun dappertutto parte
every: ogni tutti tutte tutta tutto ciascun* nessun nessuna nessuno qualunque qualsiasi
form: rispost* rispond* frase frasi parola parole riga righe paragraf* tabell* elenc* punto punti
  titol* emoji* faccin* formato* markdown json codice commenti variabil* funzion* italiano ingles*
  frances* tedesc* spagnol* lingua lingue ortograf* fonte fonti citazion* numero numeri cifre data
  date ora orari* unita metri chilo* gramm* gradi celsius euro franchi dollari prezz* import*
  decimal* virgol* tono stile abbrevia* gergo termini anglicism* link formul* esempi* riassunt*
  introduzion* messagg* testo testi mail lettera lettere caratter* pagin* spiegazion* soluzion*
  maiuscol* minuscol* esclamativ* riferimenti vocabol* asterisc* schwa
manner: breve brevi corto corta corti concis* semplic* cortes* formal* neutr* dirett* sever*
  gentil* sincer* chiar* piano letteral* ironia umorism* facil* caloros*
address: tu lei voi chiamami chiamarmi mi_chiami mi_dia dammi_del darmi_del signor* dottor* nome
  pronomi
use: usa usi usare utilizza* evita* mantieni rispondi rispondimi comincia* inizia* finisci chiudi
  termina* smetti* resta ricorda* tieni tienine tienilo menziona* nominare indica* precisa*
  aggiungi metti scrivi parla parlami sii fai fa considera* comportati rispetta* firma cita
  correggi avvisa* avverti* proponi* proporre dai dammi di dimmi spiega* descrivi* converti
  traduci tradurre cerca calcola lascia parti
once: traduci riassumi scrivimi scrivi_un scrivi_una dammi_cinque raccontami mostrami spiegami
  redigi trovami confronta fai_una fammi calcola trasforma correggi_questa aiut* puoi potresti
  controlla ordina conta accorcia riscrivi immagina prepara* dimmi_tre togli rifallo
this: questo questa questi queste seguente oggi domani ieri adesso_la ancora_uno stavolta il_testo
  l_articolo prossim* ultim*
need: allerg* vegan* vegetarian* ciec* daltonic* sord* dislessic* screen_reader rotelle diabet*
  glutine lattosio celiac* musulman* ebre* kosher halal incinta armi principiant* budget disabil*
  occhi fobia livello telefono ipovedente
wish: per_favore per_piacere pls grazie voglio vorrei preferi* desidero bisogno deve devono devi
  importante mi_serve mi_servono grat* piacciono sarebbe
no: non senza ne niente nulla nemmeno invece al_posto basta evita* mai
only: solo soltanto unicamente massimo minimo piu_di al_massimo
if: se quando appena qualora
self: io mi me mio mia miei mie noi ci nostr* sono ho
past: era erano ha hanno ho abbiamo detto ieri da_quando prima eravamo stato stata
people: lui loro suo sua suoi madre padre nonn* sorella fratello figli* bambin* marito moglie
  vicin* collega amic* prof* capo capa medico client*
asks: perche come cosa quale quali chi dove quanto quant* che e_vero c_e si_puo
thanks: grazie_mille ottimo perfetto buongiorno bene ok ciao
""",
    "Portuguese": """
lasting: a_partir de_agora em_diante daqui_para daqui_por por_diante doravante ate_segunda
  enquanto conversa futuro
always: sempre nunca jamais toda_vez todas_as sistematicamente exclusivamente em_todo lugar_nenhum
  ao_longo
every: cada todo todos todas toda nenhum nenhuma qualquer tudo
form: respost* respond* frase frases palavra* linha* paragrafo* tabel* lista listas topico* item
  itens titulo* emoji* formato markdown json codigo comentario* variave* funco* portugues* ingles*
  frances* alemao espanhol idioma* lingua linguagem ortograf* fonte fontes citac* numero* data
  datas hora horari* unidade* metro* quilo* grama* graus celsius euro* reais dolar* preco* valor*
  decima* virgula* tom estilo abrevia* jargao termo* anglicism* link* formula* exemplo* resumo
  introduc* mensage* texto textos mail carta cartas caracter* pagina* explicac* soluc* maiuscul*
  minuscul* exclamac* referenc* vocabul* asterisc* aspas travess* medidas
manner: breve curto* curta* curtinho concis* simples educad* formal* neutr* diret* sever* gentil
  sincer* clar* devagar literal ironia humor facil faceis caloros* duro rigoros*
address: voce senhor* chame chama chamar trate tratar tratam dirija doutor* nome pronome*
use: use usa usar utilize utiliza* evite evita mantenha responda responde responder comece comeca
  termine termina pare para lembre lembra esqueca leve mencione indique diga acrescente ponha
  escreva escreve fale fala seja faca considere aja comporte respeite assine cite corrija avise
  sugira sugerir deixe da de me_de explique descreva converta traduza procure parta calcule
  continue
once: traduza resuma escreva_um escreva_uma me_de conte mostre explique redija ache compare
  faca_uma faca_um calcule transforme corrija_esta ajud* pode poderia veja ordene encurte
  reescreva imagine prepar* tire faz sugira_um monte
this: isto isso este esta estes seguinte* hoje amanha ontem agora_a mais_um desta_vez o_texto
  o_artigo proxim* ultim* neste
need: alerg* vegan* vegetarian* ceg* daltonic* surd* dislex* leitor_de tela rodas diabet* gluten
  lactose celiac* muculman* jude* kosher halal gravida iniciante orcamento deficien* vista visao
  fobia nivel celular
wish: por_favor faz_favor quero queria gostaria gostava prefiro prefer* preciso agradec* obrigad*
  deve devem tem_que tem_de importante gosto desejo
no: nao sem nem nada em_vez evite nunca
only: so somente apenas maximo minimo mais_de no_maximo chega
if: se quando sempre_que assim_que
self: eu me meu minha meus minhas nos nosso nossa sou estou tenho comigo
past: era eram foi foram disse ontem desde antes estivemos tinha fui
people: ele ela eles seu sua mae pai avo irma irmao filho filha filhos crian* marido mulher
  vizinh* colega amig* professor* chefe medico client*
asks: por_que como que o_que qual quais quem onde quanto* quanta* e_verdade ha pode_se
thanks: muito_obrigad* otimo perfeito bom_dia ola bem ok certo
""",
    "Dutch": """
lasting: vanaf_nu vanaf_hier vanaf_dit voortaan van_nu het_vervolg tot_nader zolang gesprek
  toekomst vanaf
always: altijd nooit steeds telkens elke_keer overal nergens uitsluitend standaard consequent
  in_geen
every: elk elke ieder* alle al heel hele geen_enkel*
form: antwoord* zin zinnen woord* regel regels alinea* tabel* lijst* opsomming* punt punten
  puntjes kop kopjes koppen emoji* smiley* formaat markdown json code commentaar variabel*
  functie* inspring* nederlands* engels* frans* duits* spaans* taal spelling bron bronnen citat*
  citaten getal* cijfer* datum* tijd tijden eenhe* meter* kilo* gram graden celsius euro* dollar*
  prijz* bedrag* decimal* komma* toon stijl afkorting* jargon vakjargon vaktermen term termen
  anglicism* link* formule* voorbeeld* samenvatting inleiding bericht* tekst* mail* brief brieven
  teken* bladzijde pagina* uitleg oplossing* hoofdletter* letters uitroeptekens verwijzing* maten
  afstanden tests
manner: kort* bondig beknopt eenvoudig* simpel* beleefd formeel neutraal zakelijk direct streng*
  vriendelijk eerlijk duidelijk langzaam letterlijk ironie humor makkelijk* gewoon
address: je_en jij u me_aan noem noemen spreek aangesproken meneer mevrouw heet naam voornaam*
  tutoye*
use: gebruik vermijd hou houd antwoord begin eindig sluit stop blijf onthoud denk vermeld geef zet
  schrijf praat spreek wees doe ga noem let stel vertaal leg laat reken onderteken verbeter
  waarschuw speel herhaal beschrijf probeer neem zeg voeg zorg
once: vertaal vat schrijf_een geef_me vertel laat_een leg_uit zoek vergelijk maak_een maak
  reken_uit zet_de verbeter_deze help kun kunt kijk sorteer tel kort_de herschrijf bedenk verzin
  stel_een bereken
this: dit deze dat_nog volgende vandaag morgen gisteren nu_hetzelfde nog_een deze_keer de_tekst
  het_artikel vorige laatste
need: allerg* vegan* vegetar* blind* kleurenblind doof slechthorend slechtziend dyslect*
  schermlezer rolstoel diabe* gluten lactose coeliakie moslim* joods* koosjer halal zwanger
  beginner budget beperking ogen fobie niveau telefoon
wish: alsjeblieft alstublieft svp graag wil zou liever voorkeur nodig moet moeten hoef hoeft
  belangrijk fijn mag
no: geen niet zonder noch plaats_van nooit weg
only: alleen slechts hooguit maximaal max meer_dan minstens uitsluitend
if: als wanneer zodra indien
self: ik mij me mijn we wij ons onze ben heb
past: was waren had hadden heeft hebben werd zei gisteren sinds vroeger geweest
people: hij zij ze haar hem zijn moeder vader oma opa zus broer zoon dochter kind* man vrouw buur*
  collega vriend* leraar baas dokter klant*
asks: waarom hoe wat welke wie waar wanneer_is kun_je is_het bestaat klopt
thanks: dank bedankt top perfect goedemorgen hallo goed oke ok prima
""",
    "Chinese": """
lasting: 以后 从现在 从今 今后 往后 接下来 此刻起 开始 从这条 整个 期间 另行 对话中
  之前
always: 永远 总是 始终 一直 每次 每回 一律 都要 都得 统一 任何 凡是 绝不 从不 千万
  务必 统统 一概 随时
every: 每个 每条 每封 所有 全部 都 每道 各 整本
form: 回答 回复 答案 句子 句话 句 字 词 行 段落 段 表格 列表 清单 标题 表情 符号
  格式 代码 注释 变量 函数 缩进 中文 英文 英语 日语 法语 粤语 繁体 简体 普通话 语言
  语气 来源 出处 引文 引用 数字 日期 时间 单位 公里 公斤 摄氏 人民币 美元 价格 金额
  小数 链接 公式 例子 举例 总结 消息 短信 邮件 信件 术语 文案 感叹号 字母 页码 编号
  拼音 谚语 结尾 开头 落款 分点 口气 文献
manner: 简短 简单 简洁 短 礼貌 正式 中立 直接 严格 幽默 亲切 随意 详细 通俗 清楚
  慢慢 老实 客套
address: 叫我 称呼 您 我叫 名字 老师 博士 先生 女士 称为 别叫 你是 扮演 你就
use: 用 请用 使用 避免 保持 保留 注明 标出 标上 写成 加上 附上 提醒 记住 注意 纠正
  换算 考虑 默认 别用 不要用 就当 当成 只写 只说 只给 指出 按
once: 翻译成 帮我 写一 给我看 给我讲 讲讲 解释一下 总结这 列出 比较 改成 改得 起个
  推荐个 做一个 找一 告诉我 说出 检查 算给 能帮 重写 再写 再来 出题 写个 转成
this: 这段 这篇 这个 这句 下面 今天 明天 昨天 这次 现在写 刚才 如下 今晚 第二 第三
  下周 这份
need: 过敏 吃素 纯素 盲 看不见 色盲 聋 读屏 轮椅 糖尿病 麸质 穆斯林 清真 怀孕 新手
  预算 障碍 眼睛 视力 害怕 水平 手机 听不懂 看不了 不懂 耳背
wish: 请 希望 想 麻烦 最好 喜欢 需要 必须 要 更喜欢 应该
no: 不 别 不要 没 不用 勿 非 少 不能 不许 不准
only: 只 仅 最多 不超过 不能超过 至少 以内 就行
if: 如果 要是 只要 的时候 时 凡 万一 时候
self: 我 我们 我的
past: 了 过 以前 去年 从小 已经 之后 那时
people: 他 她 妈 爸 奶奶 爷爷 妹妹 弟弟 哥 儿子 女儿 孩子 先生 太太 邻居 同事
  朋友 老师 老板 领导 医生 客户 老王
asks: 为什么 怎么 什么 哪 谁 多少 多久 吗 呢 几 是不是 有没有 如何 吧
thanks: 谢谢 太好 完美 好的 你好 早上 没关系 不错
""",
}
